"""Reports, printed or drawn: runs compared, a plan, the statistics of a dataset, this machine."""
