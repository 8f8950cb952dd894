"""Alerts that are not delivered yet, in the service's database, together with what was told already.

One transaction writes both, so a restart neither forgets an alert nor makes it again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, insert, select

from services.alerts.alert import Alert
from services.keys.database import Database, alert_levels_table, alerts_table
from services.keys.records import now


@dataclass(frozen=True)
class Undelivered:
    """An alert for one receiver."""

    number: int
    id: str
    body: str
    created: datetime


class Outbox:
    """The alerts of one service, by its namespace; every method is one transaction."""

    def __init__(self, database: Database, namespace: str) -> None:
        self._database = database
        self._namespace = namespace

    def levels(self) -> dict[str, float]:
        """See `Conditions.levels`."""
        mine = alert_levels_table.c.namespace == self._namespace
        with self._database.transaction() as connection:
            text = connection.execute(select(alert_levels_table.c.levels).where(mine)).scalar()
        return {} if text is None else json.loads(text)

    def put(self, alerts: Sequence[Alert], levels: Mapping[str, float], receivers: Sequence[str]) -> None:
        """Store alerts for each receiver, and the levels after them."""
        mine = alert_levels_table.c.namespace == self._namespace
        with self._database.transaction() as connection:
            connection.execute(delete(alert_levels_table).where(mine))
            connection.execute(insert(alert_levels_table).values(namespace=self._namespace, levels=json.dumps(levels)))
            number = connection.execute(select(func.coalesce(func.max(alerts_table.c.number), 0))).scalar_one()
            for alert in alerts:
                for receiver in receivers:
                    number += 1
                    connection.execute(
                        insert(alerts_table).values(
                            number=number,
                            namespace=self._namespace,
                            receiver=receiver,
                            id=alert.id,
                            body=alert.body(),
                            created=now().isoformat(),
                        )
                    )

    def first(self, receiver: str) -> Undelivered | None:
        """The oldest alert for a receiver."""
        mine = (alerts_table.c.namespace == self._namespace) & (alerts_table.c.receiver == receiver)
        with self._database.transaction() as connection:
            row = connection.execute(select(alerts_table).where(mine).order_by(alerts_table.c.number).limit(1)).first()
        return None if row is None else Undelivered(row.number, row.id, row.body, datetime.fromisoformat(row.created))

    def remove(self, number: int) -> None:
        """It was delivered, or given up."""
        with self._database.transaction() as connection:
            connection.execute(delete(alerts_table).where(alerts_table.c.number == number))

    def keep_receivers(self, receivers: Sequence[str]) -> None:
        """Drop what is for receivers that are not configured any more."""
        others = (alerts_table.c.namespace == self._namespace) & alerts_table.c.receiver.not_in(receivers)
        with self._database.transaction() as connection:
            connection.execute(delete(alerts_table).where(others))
