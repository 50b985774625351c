"""Schedulers of TorchX with their faults corrected, a module each; TorchX finds them by their entry points."""
