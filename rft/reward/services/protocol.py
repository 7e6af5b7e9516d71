"""The protocol between a run and a server of `mode=serve`.

POST /score {"id": text, "responses": [N texts], "rows": [N objects]} is answered with {"id": the same text, "count": N,
"results": [N objects]}. A result has `total` (a number, or null without a score), `terms` and `numbers` (values by
name, without those that are missing) and `unscored` (the reason by the name of every term without a value).

GET /health is answered with {"ready": true, "terms": {name: fingerprint}, "rows": most responses of a request, ...}.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SCORE, HEALTH = "/score", "/health"


def fingerprint(node: Mapping[str, Any], besides: tuple[str, ...]) -> str:
    """A hash of the options of a term: equal for terms that compute the same values.

    Args:
        node: of the term in the yaml.
        besides: keys that are not its options.
    """
    options = {name: value for name, value in node.items() if name not in besides}
    return hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]
