// The rule form: shows only the fields of the chosen algorithm, and updates sentence and chart while values are typed.
"use strict";
{
  const start = () => {
    const select = document.querySelector("[data-ratelimits-fields]");
    if (!select) return;
    const byAlgorithm = JSON.parse(select.dataset.ratelimitsFields);
    const explanations = JSON.parse(select.dataset.ratelimitsExplanations);
    const all = new Set(Object.values(byAlgorithm).flat());
    const preview = document.querySelector("[data-ratelimits-preview]");
    const trial = document.querySelector("[data-ratelimits-trial]");
    const explanation = document.createElement("p");
    explanation.className = "ratelimits-explanation";
    explanation.setAttribute("role", "status");
    select.closest(".form-row").append(explanation);
    if (trial && trial.nextElementSibling) trial.nextElementSibling.hidden = true;
    let timer = 0;
    let newest = 0;

    const show = () => {
      const shown = new Set(byAlgorithm[select.value] || []);
      const fieldsets = new Set();
      for (const name of all) {
        const row = document.querySelector(`.form-row.field-${name}`);
        if (!row) continue;
        row.hidden = !shown.has(name);
        fieldsets.add(row.closest("fieldset"));
        // Disabled inputs are not sent, so an old value in a hidden field cannot cause an error.
        for (const input of row.querySelectorAll("input, select")) input.disabled = row.hidden;
      }
      for (const fieldset of fieldsets) fieldset.hidden = !fieldset.querySelector(".form-row:not([hidden])");
      explanation.textContent = explanations[select.value] || "";
    };

    // The values are sent by POST, with the form's token: so they stand in no address.
    const ask = (address) => {
      const url = new URL(address, location.href);
      url.searchParams.set("fragment", "1");
      return fetch(url, {method: "POST", body: new FormData(select.form)});
    };

    const read = async () => {
      const number = ++newest;
      const read = await ask(preview.dataset.ratelimitsPreview);
      if (!read.ok || number !== newest) return;
      const answer = await read.json();
      preview.textContent = answer.sentence || Object.values(answer.errors).flat().join(" ");
      if (!trial) return;
      const tried = await ask(trial.dataset.ratelimitsTrial);
      const fragment = await tried.text();
      if (!tried.ok || number !== newest) return;
      const open = [...trial.querySelectorAll("details")].map((details) => details.open);
      trial.innerHTML = fragment;
      trial.querySelectorAll("details").forEach((details, index) => { details.open = open[index] || false; });
    };

    const readSoon = () => {
      if (!preview) return;
      clearTimeout(timer);
      timer = setTimeout(read, 250);
    };

    // A starting point keeps what the page's address says besides, such as the plan.
    for (const link of document.querySelectorAll("[data-ratelimits-start]")) {
      const kept = new URLSearchParams(location.search);
      for (const name of [...kept.keys()]) if (name !== "plan" && !name.startsWith("_")) kept.delete(name);
      for (const [name, value] of new URL(link.href).searchParams) kept.set(name, value);
      link.search = kept;
    }

    select.addEventListener("change", show);
    select.form.addEventListener("input", readSoon);
    select.form.addEventListener("change", readSoon);
    show();
    if (select.form.querySelector("[name=capacity]").value || select.form.querySelector("[name=rate]").value) readSoon();
  };
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
}
