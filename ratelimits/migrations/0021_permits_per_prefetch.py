from django.db import migrations, models

HELP = (
    'Maximum number of requests whose permits a process takes in advance in one call, to spend them without asking'
    ' Redis. Requests that only such rules limit are not counted as usage. Empty: Redis decides and counts every'
    ' request.'
)


class Migration(migrations.Migration):
    """Rename `allotment` of rules, and of their history, to `prefetch`."""

    dependencies = [
        ('ratelimits', '0001_squashed_0020_gaps_of_reports_alone'),
    ]

    operations = [
        migrations.RemoveConstraint(
            model_name='rule',
            name='ratelimits_rule_allotment',
        ),
        migrations.RenameField(
            model_name='rule',
            old_name='allotment',
            new_name='prefetch',
        ),
        migrations.RenameField(
            model_name='historicalrule',
            old_name='allotment',
            new_name='prefetch',
        ),
        migrations.AlterField(
            model_name='rule',
            name='prefetch',
            field=models.PositiveIntegerField(blank=True, help_text=HELP, null=True, verbose_name='permits per prefetch'),
        ),
        migrations.AlterField(
            model_name='historicalrule',
            name='prefetch',
            field=models.PositiveIntegerField(blank=True, help_text=HELP, null=True, verbose_name='permits per prefetch'),
        ),
        migrations.AddConstraint(
            model_name='rule',
            constraint=models.CheckConstraint(
                condition=models.Q(
                    ('prefetch', None),
                    models.Q(
                        ('bills', False),
                        ('prefetch__gte', 1),
                        models.Q(
                            ('algorithm', 'calendar_window'),
                            models.Q(('algorithm', 'fixed_window'), ('window_start__in', ['', 'epoch'])),
                            _connector='OR',
                        ),
                    ),
                    _connector='OR',
                ),
                name='ratelimits_rule_prefetch',
                violation_error_message='Leave permits per prefetch empty, or give 1 or more to a fixed or calendar window that does not bill.',
            ),
        ),
    ]
