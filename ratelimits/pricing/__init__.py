"""Prices of quantities, as pure values; the models that people edit and the reports both use them."""
