"""Who moves money: a payment service behind the ledger's interface. The ledger itself knows nothing of them."""
