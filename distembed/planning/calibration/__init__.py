"""Measures the numbers of a machine from which times are estimated, by real steps of small tables.

Every estimate of a step is a sum of counts times numbers of the device: rows, bytes, operations, collectives. The
*probes* are steps of tables that are sharded in different ways, of different widths, batches and numbers, on all ranks
at once; the numbers are those with which the estimates of the probes differ least from what they took
(:mod:`~distembed.planning.calibration.fit`). So what is written is what estimates need, whatever the processor, and
nothing is converted from another benchmark's units. What cannot be measured, such as exchanges on one rank or between
nodes on one node, keeps the catalogue's number, and the file says so.
"""
