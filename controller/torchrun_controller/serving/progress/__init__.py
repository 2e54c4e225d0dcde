"""Progress from the workers: one authenticated port, and the newest report of each job in memory.

    launcher --POST /v1/progress--> endpoint --token--> tokens --TokenReview--> API server
                                        |
                                     reports --> observe --> reconcile --> status

A report is worth little and comes again within seconds, so nothing here is kept, retried or queued:
what is too much, too early or sent to a standby is refused, and the sender tries again.
"""
