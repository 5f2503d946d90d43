import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('ratelimits', '0041_start_from_ledger'),
    ]

    operations = [
        migrations.AddField(
            model_name='taskrun',
            name='first_run_at',
            field=models.DateTimeField(default=django.utils.timezone.now, verbose_name='first run'),
        ),
    ]
