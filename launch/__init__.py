"""Starts distembed on clusters: TorchX components, a scheduler for Slurm, checks before a job is submitted.

It is imported and installed as ``distembed.launch``, to which this folder is linked: ``launch`` in ``site-packages``
would hide other packages of this name.
"""
