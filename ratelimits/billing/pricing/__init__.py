"""Calculate the prices of quantities. Models and reports use this code. It uses neither the database nor Redis."""
