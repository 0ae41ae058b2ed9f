from tf_avgstrategy.schedules import losses


def test_adds_up_until_a_look():
    meter = losses.LossMeter()
    assert meter.since_last_look() == (0.0, 0.0)
    meter.add(2.0, 1)
    meter.add(5.0, 2)
    assert meter.since_last_look() == (4.0, 3)
    meter.look()
    meter.add(1.0, 1)
    assert meter.since_last_look() == (1.0, 1)


def test_reads_sums_that_begin_anew():
    sums = [(6.0, 3.0)]
    meter = losses.LossMeter()
    meter.read_from(lambda: sums[0])
    assert meter.since_last_look() == (2.0, 3.0)
    meter.look()
    sums[0] = (11.0, 4.0)
    assert meter.since_last_look() == (5.0, 1.0)
    # A new epoch, in which as many rows were seen when workers meet.
    meter.look()
    meter.begin_epoch()
    sums[0] = (8.0, 4.0)
    assert meter.since_last_look() == (2.0, 4.0)
    sums[0] = None
    assert meter.since_last_look() == (0.0, 0.0)


def test_goes_on_with_what_was_saved():
    meter = losses.LossMeter()
    meter.add(3.0, 2)
    again = losses.LossMeter()
    again.restore(meter.since_last_look())
    again.add(6.0, 1)
    assert again.since_last_look() == (4.0, 3)
