"""One module per way of moving bytes."""
