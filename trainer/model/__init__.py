"""What is computed: the frozen target, the drafter, who attends to whom, the loss, and the FLOPs of it all."""
