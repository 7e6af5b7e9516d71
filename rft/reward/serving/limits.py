"""The limits of a server of reward terms."""

from dataclasses import dataclass

from rft.ranges import PositiveFloat, PositiveInt


@dataclass
class Limits:
    """What a server accepts; the yaml documents each option.

    Attributes:
        body_mib: size of a request in MiB.
        rows: responses of a request, and of all requests that are scored together.
        requests: requests at the same time, waiting or being scored.
        end_s: seconds for requests in flight when the server ends.
    """

    body_mib: PositiveFloat
    rows: PositiveInt
    requests: PositiveInt
    end_s: PositiveInt
