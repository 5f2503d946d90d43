"""What quantities cost: pure values, shared by the models that people edit and the reports that are priced."""
