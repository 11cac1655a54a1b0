"""What a machine is made of, as far as moving bytes goes."""
