"""Stores undelivered alerts in the service's database, together with the levels of their conditions.

One transaction writes both (the transactional outbox pattern), so a restart neither loses an alert nor repeats it.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, insert, select

from privmix.alerts.alert import Alert
from privmix.database.clock import now
from privmix.database.service import ServiceDatabase, alert_levels_table, alerts_table


@dataclass(frozen=True)
class Undelivered:
    """Holds an alert for one receiver."""

    number: int
    id: str
    body: str
    created: datetime


class Outbox:
    """Stores the alerts of one service, which its namespace identifies. Every method is one transaction."""

    def __init__(self, database: ServiceDatabase, namespace: str) -> None:
        self._database = database
        self._namespace = namespace

    def levels(self) -> dict[str, float]:
        """Returns the stored `Conditions.levels`."""
        mine = alert_levels_table.c.namespace == self._namespace
        with self._database.transaction() as connection:
            text = connection.execute(select(alert_levels_table.c.levels).where(mine)).scalar()
        return {} if text is None else json.loads(text)

    def put(self, alerts: Sequence[Alert], levels: Mapping[str, float], receivers: Sequence[str]) -> None:
        """Stores the alerts for each receiver, and the levels of the conditions."""
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

    def first(self, receiver: str, without: Collection[int] = ()) -> Undelivered | None:
        """Returns the oldest alert for a receiver whose number is not in `without`; None if there is none."""
        mine = (alerts_table.c.namespace == self._namespace) & (alerts_table.c.receiver == receiver)
        mine &= alerts_table.c.number.not_in(without)
        with self._database.transaction() as connection:
            row = connection.execute(select(alerts_table).where(mine).order_by(alerts_table.c.number).limit(1)).first()
        return None if row is None else Undelivered(row.number, row.id, row.body, datetime.fromisoformat(row.created))

    def remove(self, number: int) -> None:
        """Removes an alert that was delivered or abandoned."""
        with self._database.transaction() as connection:
            connection.execute(delete(alerts_table).where(alerts_table.c.number == number))

    def keep_receivers(self, receivers: Sequence[str]) -> None:
        """Removes the alerts for all other receivers, which are no longer configured."""
        others = (alerts_table.c.namespace == self._namespace) & alerts_table.c.receiver.not_in(receivers)
        with self._database.transaction() as connection:
            connection.execute(delete(alerts_table).where(others))
