"""Where the masters of the store are: fixed addresses, or records in etcd."""
