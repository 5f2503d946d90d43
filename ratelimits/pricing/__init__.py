"""Prices of quantities. They are pure values; the models that people edit and the reports both use them."""
