"""Knowledge graphs over the ids of one table, in compressed sparse rows."""
