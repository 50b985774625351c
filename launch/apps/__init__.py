"""What TorchX is asked for: the values that a job is made of, and the applications that are built from them."""
