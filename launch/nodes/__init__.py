"""Programs on the nodes of a job: they wait for the first node, run the ranks, and start them again.

Code that submits jobs imports only :mod:`~distembed.launch.nodes.exit_codes`.
"""
