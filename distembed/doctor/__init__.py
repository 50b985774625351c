"""What this machine has, what does not work, and the command that mends it.

It needs nothing but the standard library to be imported, so that it works where the rest of the package does not.
"""

from distembed.doctor.doctor import run_doctor

__all__ = ["run_doctor"]
