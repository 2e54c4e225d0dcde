"""Where the code of a function is: in a module, a script or a notebook, and its import in a pod."""
