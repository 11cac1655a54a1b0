"""What a master knows: copies, space, leases, open puts, pins, groups, tenants; kept in step."""
