"""What servers of this package accept from their clients, and which clients reach them."""

import ipaddress
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


@dataclass
class ScoringLimits(HttpLimits):
    """What a server of reward terms accepts.

    Attributes:
        rows: responses of a request, and of all requests that are scored together.
        requests: requests at the same time: arriving, waiting or being scored.
        end_s: seconds for requests in flight when the server ends.
    """

    rows: PositiveInt
    requests: PositiveInt
    end_s: PositiveInt


def is_loopback(host: str) -> bool:
    """True for an address that this machine alone reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
