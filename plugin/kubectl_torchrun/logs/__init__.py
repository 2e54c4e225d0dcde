"""Logs of the nodes of a job: streams, their merge by time, copies of earlier attempts."""
