"""First process of a worker's container: gets the code, starts the command, tells how it ended.

Standard library and Python 3.8 syntax only: it runs on the Python of the user's image.
"""
