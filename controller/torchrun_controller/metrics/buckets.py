"""Upper bounds of the buckets of histograms."""

# Buckets in seconds. A reconcile without writes takes less than a millisecond, a write a few.
REQUEST_BUCKETS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
)
ADMISSION_BUCKETS = (0.1, 1, 5, 30, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 24 * 3600, 72 * 3600)
QUEUE_BUCKETS = (0.0001, 0.001, 0.01, 0.1, 1, 10, 100, 1000)
# Buckets in seconds: of an upload or a start, up to half an hour; of a phase, up to days.
START_BUCKETS = (0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 45, 60, 120, 300, 600, 1800)
_DAY = 86_400
PHASE_BUCKETS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, _DAY // 2, _DAY, 3 * _DAY, 7 * _DAY)
SIZE_BUCKETS = (1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11)
