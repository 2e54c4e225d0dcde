"""Logs of the workers of a job: streams, their merge by time, copies of earlier attempts."""
