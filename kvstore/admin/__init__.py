"""What administrators ask of the store: over the masters' wire, over HTTP, and as metrics."""
