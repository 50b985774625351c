"""Requests of jobs, and the applications of TorchX that are built from them."""
