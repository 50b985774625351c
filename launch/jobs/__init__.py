"""Training jobs: what a run folder keeps of them, the checks before they are submitted, and following them."""
