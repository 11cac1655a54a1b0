"""What leads to one peer: rails, who takes which slice of what, and what is done when one fails."""
