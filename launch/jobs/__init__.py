"""Training jobs: their files in run folders, checks before they are submitted, and following them."""
