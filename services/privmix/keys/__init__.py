"""Owns API keys, their groups, their shares of the budget and their rate limits.

Start at `actor.py`: gateways ask this Ray actor to identify a key, to admit a request and to settle what it used.
`open_requests.py` admits requests and returns their unused tokens, `store.py` keeps the data, `transactions.py` applies
the operations of concurrent requests together, `fair_queue.py` decides who is next while the service is full. Shares
divide one guarantee; the guarantee itself is the ledger's.
"""
