"""What runs on the nodes of a job: waiting for the first one, the ranks, and when they start again.

Nothing here is imported where jobs are submitted but :mod:`~launch.nodes.exit_codes`.
"""
