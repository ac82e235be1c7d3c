"""Models of other libraries at tiny sizes, for libraries.py: a module per library, whose `MODELS` are cases by name."""
