"""What tpplan leans on in torch that torch does not promise, and the versions of torch it was tested with."""
