"""Options and help of the commands. Modules that only the work needs are not imported here."""
