"""What is learnt: the loss and the outputs of a batch, and the metrics of an evaluation."""
