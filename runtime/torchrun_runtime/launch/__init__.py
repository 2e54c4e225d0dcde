"""The first process of a worker's container: copies the code, runs the command, reports its end.

Standard library and Python 3.8 syntax only: it runs on the Python of the user's image.
"""
