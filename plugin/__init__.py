"""Choosing an executor and saying why; the public calls; the command line."""
