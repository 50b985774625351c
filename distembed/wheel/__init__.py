"""The build of distembed's wheel, which pip calls; nothing imports it in a run."""
