"""The functions, one file each."""
