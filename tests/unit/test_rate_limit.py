from torchrun_controller.rate_limit import Rate, TokenBucket, TokenBuckets

RATE = Rate(per_second=0.5, burst=2)


def test_reservations_wait_for_tokens() -> None:
    time = [0.0]
    bucket = TokenBucket(RATE, lambda: time[0])
    assert [bucket.reserve() for _ in range(4)] == [0, 0, 2, 4]
    time[0] = 4
    assert bucket.level() == 0
    assert bucket.reserve() == 2
    time[0] = 1000
    assert bucket.level() == 2, "at most the burst"


def test_buckets_refill_and_full_ones_are_removed() -> None:
    time = [0.0]
    buckets: TokenBuckets[str] = TokenBuckets(RATE, lambda: time[0], size=3)
    assert all(buckets.has_token("a") and buckets.take("a") for _ in range(2))
    assert not buckets.has_token("a")
    assert not buckets.take("a")
    time[0] = 2
    assert buckets.has_token("a")
    time[0] = 4
    assert buckets.take("b")
    assert len(buckets) == 1, "a is full"
    for key in "cdefg":
        assert buckets.take(key)
    assert len(buckets) == 3
