"""The controllers: the loop that takes keys, and a reconciler each for jobs, queues, admission."""
