"""What a server of this package accepts from its clients."""

from dataclasses import dataclass

from rft.ranges import PositiveFloat, PositiveInt


@dataclass
class HttpLimits:
    """What a server accepts from all clients together.

    Attributes:
        body_mib: size of a request in MiB; a larger one gets the status 413.
        request_s: seconds in which a request has to arrive; a later one gets 408.
        connections: at the same time; more get 503.
    """

    body_mib: PositiveFloat
    request_s: PositiveFloat
    connections: PositiveInt
