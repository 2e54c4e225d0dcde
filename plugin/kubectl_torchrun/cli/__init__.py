"""The commands' options and help, by subject. Nothing here loads what only the work needs."""
