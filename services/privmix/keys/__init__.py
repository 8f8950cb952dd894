"""Owns API keys and their shares of the budget.

Start at `actor.py`: gateways ask this Ray actor to identify a key, to admit a request and to settle what it used.
`open_requests.py` admits requests and returns their unused tokens, `reservations.py` charges shares in the database,
`fair_queue.py` decides who is next while the service is full, and `store.py` changes keys for `privmix keys`. Shares
divide one guarantee; the guarantee itself is the ledger's.
"""
