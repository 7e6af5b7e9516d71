"""The limits of a server of reward terms."""

from dataclasses import dataclass

from rft.ranges import PositiveInt
from rft.remote.http_limits import HttpLimits


@dataclass
class Limits(HttpLimits):
    """What a server accepts; the yaml documents each option.

    Attributes:
        rows: responses of a request, and of all requests that are scored together.
        requests: requests at the same time: arriving, waiting or being scored.
        end_s: seconds for requests in flight when the server ends.
    """

    rows: PositiveInt
    requests: PositiveInt
    end_s: PositiveInt
