// The rule form: shows only the fields of the chosen algorithm, and updates the sentence while values are typed.
"use strict";
{
  const start = () => {
    const select = document.querySelector("[data-ratelimits-fields]");
    if (!select) return;
    const byAlgorithm = JSON.parse(select.dataset.ratelimitsFields);
    const all = new Set(Object.values(byAlgorithm).flat());
    const preview = document.querySelector("[data-ratelimits-preview]");
    let timer = 0;
    let newest = 0;

    const show = () => {
      const shown = new Set(byAlgorithm[select.value] || []);
      for (const name of all) {
        const row = document.querySelector(`.form-row.field-${name}`);
        if (!row) continue;
        row.hidden = !shown.has(name);
        // Disabled inputs are not sent, so an old value in a hidden field cannot cause an error.
        for (const input of row.querySelectorAll("input, select")) input.disabled = row.hidden;
      }
    };

    const read = async () => {
      const number = ++newest;
      const query = new URLSearchParams(new FormData(select.form));
      query.delete("csrfmiddlewaretoken");
      const response = await fetch(`${preview.dataset.ratelimitsPreview}?${query}`);
      if (!response.ok || number !== newest) return;
      const answer = await response.json();
      preview.textContent = answer.sentence || Object.values(answer.errors).flat().join(" ");
    };

    const readSoon = () => {
      if (!preview) return;
      clearTimeout(timer);
      timer = setTimeout(read, 250);
    };

    select.addEventListener("change", show);
    select.form.addEventListener("input", readSoon);
    select.form.addEventListener("change", readSoon);
    show();
    if (select.form.querySelector("#id_capacity").value) readSoon();
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
