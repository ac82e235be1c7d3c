"""What each choice costs: compute by running ops on meta tensors, collectives and memory from the profile."""
